"""What specs mean, written from the language's contract alone: masks, figures, claims, outputs.

Nothing here asks the package; `program` reads a spec's program, and knows its classes by name.
"""
