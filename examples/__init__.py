"""The zoo: one `.attn` file per system, shipped with the package."""

if __name__ != "attnspec.examples":
    # a second import under another name would make second copies of every class
    raise ImportError("import this package as attnspec.examples")
