"""A student and a teacher have the same tokens, or are refused with the first difference."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from agentrl.errors import ModelFolderError
from agentrl.models import resolve_model
from agentrl.models.same_tokens import check_same_tokens, vocabulary


def test_a_teacher_with_another_tokenizer_is_refused_by_name() -> None:
    tiny, smollm2 = resolve_model("tiny"), resolve_model("smollm2")
    check_same_tokens(tiny, tiny)
    with pytest.raises(
        ModelFolderError, match=r"trainer\.teacher: .*smollm2 has another tokenizer than .*tiny: '.+' has"
    ):
        check_same_tokens(tiny, smollm2)
    with pytest.raises(ModelFolderError, match=r"trainer\.critic_from: .*smollm2 has another tokenizer than .*tiny"):
        check_same_tokens(tiny, smollm2, "trainer.critic_from")


def test_a_teacher_may_have_more_tokens(tmp_path: Path) -> None:
    tiny = resolve_model("tiny")
    larger = tmp_path / "larger"
    shutil.copytree(tiny, larger)
    tokenizer = json.loads((larger / "tokenizer.json").read_text())
    known = vocabulary(tiny)
    added = tokenizer["added_tokens"][-1] | {"id": max(known.values()) + 1, "content": "<|new|>"}
    tokenizer["added_tokens"].append(added)
    (larger / "tokenizer.json").write_text(json.dumps(tokenizer))
    check_same_tokens(tiny, larger)
    with pytest.raises(ModelFolderError, match=r"'<\|new\|>' has the id \d+ here and no id there"):
        check_same_tokens(larger, tiny)


def test_both_readers_of_a_tokenizer_find_the_same_vocabulary() -> None:
    from transformers import AutoTokenizer

    for name in ("tiny", "smollm2"):
        folder = resolve_model(name)
        assert vocabulary(folder) == AutoTokenizer.from_pretrained(folder).get_vocab()
