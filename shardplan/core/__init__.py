"""The data types that the stages hand to each other. Imports nothing but the standard library."""
