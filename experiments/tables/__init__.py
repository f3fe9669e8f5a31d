"""Runs to tables: the named tables, rows of results and their layout, and the files and pictures they become."""
