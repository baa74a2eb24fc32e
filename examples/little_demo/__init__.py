"""The Little Demo: a small DLRM on MovieLens whose hashed tables do not fit the device tier."""
