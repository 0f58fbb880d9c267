"""Part specs name only what the runner can fill in, and survive JSON."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from agentrl.errors import AgentRLError
from agentrl.placement.part_spec import Need, PartSpec, filled


def test_a_spec_survives_json():
    spec = PartSpec(
        name="trainer",
        argv=("trainer", "--leader", "{leader}:{leader_port:rdzv}"),
        env={"AGENTRL_PROXY_URL": "{proxy}"},
        secrets=("AGENTRL_ADMIN_KEY",),
        ranks=2,
        gang=True,
        need=Need(gpus=8),
        ports=("rdzv",),
        fenced=True,
    )
    assert PartSpec.model_validate(spec.model_dump(mode="json")) == spec
    assert spec.uses_proxy


@pytest.mark.parametrize(
    ("text", "gang", "wrong"),
    [
        ("{port:http}", False, r"\{port:http\} is not known here; known are address, proxy, python, rank, size"),
        ("{leader}", False, r"\{leader\} is not known"),
        ("{leader_port:rdzv}", True, r"\{leader_port:rdzv\} is not known"),
    ],
)
def test_an_unknown_placeholder_is_refused(text, gang, wrong):
    with pytest.raises(ValidationError, match=wrong):
        PartSpec(name="part", argv=(text,), gang=gang)


def test_names_in_braces_are_replaced_and_other_braces_stay():
    values = {"rank": "1", "port:http": "8000", "address": "10.0.0.2"}
    assert filled("http://{address}:{port:http}/{rank}", values) == "http://10.0.0.2:8000/1"
    assert filled('{"a": {}}', values) == '{"a": {}}'
    with pytest.raises(AgentRLError, match=r"\{leader\} has no value"):
        filled("{leader}", values)
