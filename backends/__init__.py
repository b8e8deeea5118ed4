"""Ways to run a plan with torch; one file, one backend."""

if __name__ != "attnspec.backends":
    # a second import under another name would make second copies of every class
    raise ImportError("import this package as attnspec.backends")
