"""What a spec means, free of its text: programs, scalars, properties of terms."""
