"""The edge agent: runs the plans of one device, and takes tasks from the applications beside it."""
