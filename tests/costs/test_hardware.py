import dataclasses
import json

import pytest
import torch

from fsdp_compile import ConfigError
from fsdp_compile.costs.hardware import HARDWARE, Hardware, find_hardware


@pytest.mark.parametrize("name", list(HARDWARE))
def test_profiles_survive_a_file(name, tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(HARDWARE[name].to_json())
    found = find_hardware(str(path))
    assert found == HARDWARE[name]
    assert found.digest == HARDWARE[name].digest


def test_digests_differ_with_what_is_described():
    hardware = HARDWARE["h100"]
    digests = {hardware.digest, dataclasses.replace(hardware, contention=1.0).digest, HARDWARE["h200"].digest}
    assert len(digests) == 3


def test_the_rate_of_a_dtype_is_a_fraction_of_its_peak():
    hardware = HARDWARE["a100-80"]
    assert hardware.flops_of(torch.bfloat16) == hardware.efficiency * 312e12
    assert hardware.flops_of(torch.float64) == hardware.flops_of(torch.float32)


def test_what_is_no_profile_is_refused(tmp_path):
    fields = json.loads(HARDWARE["h100"].to_json())
    path = tmp_path / "profile.json"
    for text, message in (
        ("{", "no hardware profile"),
        (json.dumps({"name": "x"}), "missing .*memory_bandwidth"),
        (json.dumps({**fields, "colour": "red"}), "unknown .*colour"),
        (json.dumps({**fields, "flops": {"bfloat16": 1e12}}), "figure for float32"),
        (json.dumps({**fields, "within_node": {"speed": 1}}), "speed"),
        (json.dumps({**fields, "efficiency": 1.5}), "efficiency is a fraction"),
        (json.dumps({**fields, "memory_bandwidth": -1.0}), "memory_bandwidth is a number > 0"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=message):
            find_hardware(str(path))
    with pytest.raises(ConfigError, match="'k80' is neither a file nor one of a100-40"):
        find_hardware("k80")


def test_fields_of_links_are_checked_too():
    fields = json.loads(HARDWARE["h100"].to_json())
    fields["within_node"]["bandwidth"] = 0
    with pytest.raises(ConfigError, match="within_node"):
        Hardware.from_json(json.dumps(fields))
