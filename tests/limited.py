"""Values of ATTNSPEC_LIMITS for tests that run in processes of test_other_limits.py."""

REFUSING = (
    "iterations=12,looks_grown=8388608,mask=48,mask_bytes=2304,mask_call=1600,"
    "pairs_listed=1000000,pairs_shown=8,words_read=1000"
)
"""Limits at which something is refused, made small."""
