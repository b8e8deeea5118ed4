"""A graph beside a mechanism, with one shared denominator."""
