"""What a spec reaches, costs and guarantees, computed from its graphs without running them."""
