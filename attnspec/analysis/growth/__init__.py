"""How the pairs grow with n, as formulas and orders."""
