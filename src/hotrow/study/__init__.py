"""What `profile`, `simulate`, `size` and `compare` compute.

Returns plain results. Does not know terminals or pages.
"""
