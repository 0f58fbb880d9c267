"""Secrets are read back from a private file; a host without the file is told so in one line."""

from __future__ import annotations

import json
import os
import stat

import pytest

from agentrl.environment import ADMIN_KEY, DATABASE_URL
from agentrl.errors import UserError
from agentrl.placement.run_secrets import SECRETS_FILE, adopt_storage, read_secrets, write_secrets


def test_secrets_are_private_and_come_back(tmp_path):
    secrets = {DATABASE_URL: "postgresql://u:p@db/x", ADMIN_KEY: "k"}
    write_secrets(tmp_path, secrets)
    assert stat.S_IMODE((tmp_path / SECRETS_FILE).stat().st_mode) == 0o600
    assert read_secrets(tmp_path) == secrets


def test_a_host_that_does_not_see_the_folder_is_told_so(tmp_path):
    with pytest.raises(UserError, match=r"does not see .*: put runs_dir on storage that all hosts of the run share"):
        read_secrets(tmp_path / "elsewhere")


def test_a_process_takes_the_access_to_the_storage_that_its_environment_lacks(tmp_path, monkeypatch):
    adopt_storage(tmp_path)  # the run has no secrets yet
    stored = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s", "AWS_ENDPOINT_URL": "http://minio"}
    write_secrets(tmp_path, {DATABASE_URL: "postgresql://db/x", "AWS_OTHER": "x"} | stored)
    for before, after in (
        (
            {"HOME": "/h", "AWS_ENDPOINT_URL": "http://other"},
            {"HOME": "/h"} | stored | {"AWS_ENDPOINT_URL": "http://other"},
        ),
        ({"AWS_PROFILE": "mine"}, {"AWS_PROFILE": "mine"}),
    ):
        monkeypatch.setattr(os, "environ", before)
        adopt_storage(tmp_path)
        assert os.environ == after


@pytest.mark.parametrize("text", ["", "{", "[]", json.dumps({ADMIN_KEY: "k"}), json.dumps({DATABASE_URL: 1})])
def test_a_damaged_file_is_refused(tmp_path, text):
    (tmp_path / SECRETS_FILE).write_text(text)
    with pytest.raises(UserError, match=r"\.secrets"):
        read_secrets(tmp_path)
