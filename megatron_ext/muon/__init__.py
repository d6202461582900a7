"""Distributed Muon: the orthogonalisation of a matrix, and what places it on many ranks."""
