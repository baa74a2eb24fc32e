"""Every symbol of the libraries below hybridrec that they do not promise to keep, one module a library.

Importing one of these modules checks all symbols that hybridrec uses of that library and fails with a symbol's name.
"""
