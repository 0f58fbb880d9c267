"""Calls of AReaL's routes, as its own clients make them."""

import openai

ADMIN = {"Authorization": "Bearer admin-key"}
CHOSEN = "a-key-that-somebody-chose-0123456789"
HELLO = [{"role": "user", "content": "hello"}]


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


def start(proxy, task_id="7", headers=ADMIN, **more):
    answer = proxy.post("/rl/start_session", {"task_id": task_id, **more}, headers=headers)
    assert answer.status_code == 200, answer.text
    assert set(answer.json()) == {"session_id", "api_key"}
    return answer.json()


def model(proxy, session, **options):
    """The SDK as AReaL sets it up: the proxy's own address and the session's key."""
    return openai.OpenAI(base_url=proxy.url, api_key=session["api_key"], max_retries=0, **options)


def ask(proxy, session, messages=HELLO, says="fine", **options):
    proxy.engine.enqueue(proxy.says(says))
    return model(proxy, session).chat.completions.create(model="default", messages=messages, **options)


def end(proxy, session):
    return proxy.post("/rl/end_session", headers=bearer(session["api_key"]))


def reward(proxy, session, value, call=None, **headers):
    body = {"interaction_id": call, "reward": value}
    return proxy.post("/rl/set_reward", body, headers=bearer(session["api_key"]) | headers)


def export(proxy, session, **options):
    answer = proxy.post("/export_trajectories", {"session_id": session["session_id"], **options}, headers=ADMIN)
    assert answer.status_code == 200, answer.text
    return answer.json()["interactions"]


def lists(proxy, session, **options):
    return export(proxy, session, encoding="list", **options)


def two_turns(proxy, session):
    first = ask(proxy, session)
    talk = [*HELLO, first.choices[0].message, {"role": "user", "content": "more"}]
    return first, ask(proxy, session, talk)
