"""For every test: no calibration of the machine that happens to run it."""

import os

os.environ["PARTITIONER_CALIBRATION"] = "none"
