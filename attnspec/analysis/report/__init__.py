"""Everything that is asked of a spec at one length."""
