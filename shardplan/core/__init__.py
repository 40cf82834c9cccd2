"""The data types that the stages exchange. Imports only the standard library."""
