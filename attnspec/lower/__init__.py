"""From programs to works: what each group of heads computes, and what that is estimated to cost."""
