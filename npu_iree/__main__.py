"""`python -m npu_iree`: the command line `npu-iree`."""

from npu_iree.cli import main

if __name__ == "__main__":
    main()
