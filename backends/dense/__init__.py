"""Every pair, masked."""
