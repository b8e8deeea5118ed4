"""Text <-> syntax tree of the `.attn` language; knows no pattern by name."""

if __name__ != "attnspec.grammar":
    # a second import under another name would make second copies of every class
    raise ImportError("import this package as attnspec.grammar")
