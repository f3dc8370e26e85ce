"""What the derivatives of single rows and the second derivatives of a loss tell.

Imports `stages` and what is below.
"""
