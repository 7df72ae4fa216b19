"""Where the time of calls goes: what IREE's tools record, in terms of the model and the machine."""
