"""A script as text, tree and variables, and what is to be changed in it."""
