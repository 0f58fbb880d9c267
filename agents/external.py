"""Any program can train the model: open a session, call it with the plain OpenAI SDK, reward it."""

from openai import OpenAI

from agentrl import Client

with Client() as client, client.session(task={"word": "abcd"}) as s:
    model = OpenAI(base_url=s.base_url, api_key=s.api_key)
    reply = model.chat.completions.create(model="default", messages=[{"role": "user", "content": "abcd"}], max_tokens=6)
    s.reward(1.0 if reply.choices[0].message.content == "dcba" else 0.0, interaction_id=reply.id)
    print(s.id, reply.choices[0].message.content)
