"""The search agent: what its index finds, and what an answer earns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentrl.agents.corpus_search import Corpus, CorpusSearch, articles, heldout_tasks, train_tasks
from agentrl.errors import UserError


async def test_two_searches_lead_to_the_answer(model: Any, extra: Any, said: Any) -> None:
    task = next(one for one in heldout_tasks() if "inventor" in one["question"])
    device = task["question"].partition("inventor of the ")[2].partition(" born")[0]
    model.says([("search", {"query": f"inventor of the {device}"})])
    inventor = next(text for title, text in articles() if title == device).rpartition("was ")[2].rstrip(".")
    model.says([("read", {"title": inventor.lower()})], f"Answer: {task['answer']}.")
    result = await CorpusSearch().run(task, **extra)
    assert inventor in said(1)[0]
    assert f"born in {task['answer']}" in said(2)[1]
    assert [reward.value for reward in result.rewards] == [1.0]


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ('NEAR("', "nothing found"),
        ("* OR -", "nothing found"),
        ("  ", "error: the query has no words"),
        ("x " * 1_000, "nothing found"),
        ("storms", "Weather: A storm has wind."),
    ],
)
async def test_any_query_is_words(model: Any, extra: Any, said: Any, tmp_path: Path, query: str, found: str) -> None:
    (tmp_path / "corpus.jsonl").write_text(json.dumps({"title": "Weather", "text": "A storm has wind."}) + "\n")
    model.says([("search", {"query": query})], "I do not know.")
    agent = CorpusSearch(str(tmp_path / "corpus.jsonl"))
    result = await agent.run({"question": "?", "answer": "wind"}, **extra)
    assert said(1) == [found]
    assert [reward.value for reward in result.rewards] == [0.0]


async def test_an_unknown_title_is_an_error_of_the_call(model: Any, extra: Any, said: Any) -> None:
    model.says([("read", {"title": "Nobody"})], "Answer: none")
    await CorpusSearch().run({"question": "?", "answer": "x"}, **extra)
    assert said(1) == ["error: there is no article 'Nobody'"]


@pytest.mark.parametrize(
    ("line", "error"),
    [("{}", r"line 1 .*no 'title'"), ("nonsense", "line 1 .*is no JSON object"), (None, "No such file")],
)
def test_a_corpus_that_cannot_be_read_is_refused(tmp_path: Path, line: str | None, error: str) -> None:
    file = tmp_path / "corpus.jsonl"
    if line is not None:
        file.write_text(line)
    with pytest.raises(UserError, match=f"agent_args.corpus: .*{error}"):
        CorpusSearch(str(file))


def test_each_question_has_one_answer_in_the_corpus() -> None:
    titles = [title for title, _ in articles()]
    assert len(titles) == len(set(titles))
    texts = [text for _, text in articles()]
    for task in heldout_tasks():
        assert sum(f"born in {task['answer']}." in text or f"river {task['answer']}." in text for text in texts) == 1


def test_held_out_questions_are_not_trained() -> None:
    assert {task["question"] for task in heldout_tasks()}.isdisjoint(task["question"] for task in train_tasks())


async def test_a_corpus_serves_many_episodes() -> None:
    corpus = Corpus([("a", "one"), ("b", "two")])
    assert [await corpus.search(query=word) for word in ("one", "two")] == ["a: one", "b: two"]
