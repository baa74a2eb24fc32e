"""Everything that knows TorchRec's distributed side."""
