"""What a text says: the numbers in it, and the answer that it ends with.

It knows texts alone, no tokens.
"""
