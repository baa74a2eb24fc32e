"""The only place that names a device type: one module a device, each with a module-level ``backend``."""
