"""A short fault campaign: every kind of fault about once. `make faults` runs the long one."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

CAMPAIGN = Path(__file__).with_name("campaign.py")


@pytest.mark.slow
def test_a_grid_survives_every_kind_of_fault_and_ends_like_an_undisturbed_one():
    command = [sys.executable, str(CAMPAIGN), "--faults", "8", "--per-round", "8", "--real-every", "0"]
    campaign = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert campaign.returncode == 0, campaign.stdout + campaign.stderr
    assert "complete and equal" in campaign.stdout
    injected = dict(re.findall(r"^(\w.*\w) +(\d+)$", campaign.stdout, re.MULTILINE))
    assert int(injected.pop("all")) == sum(map(int, injected.values())) == 8
