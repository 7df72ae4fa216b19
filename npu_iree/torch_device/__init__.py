"""The PyTorch device "npu": eager ops out of the same compiler, on handles all the way."""
