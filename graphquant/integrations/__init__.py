"""Ways into other tools' flows; each needs its tool, and is imported from its own module."""
