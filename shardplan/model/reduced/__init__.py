"""Reduced models for numeric proofs."""
