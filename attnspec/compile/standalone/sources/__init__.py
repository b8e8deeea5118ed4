"""What files that stand alone are put together from: ordinary source, taken over as it stands.

A module here is one idea with samples of what is generated for each spec: settings in capitals, and
functions whose docstrings say so.
"""
