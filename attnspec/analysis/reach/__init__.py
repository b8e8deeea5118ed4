"""What reads what, directly or through others."""
