"""Linear attention: feature maps, their sums, causal scans."""
