"""Test doubles that ship with agentrl: a scriptable engine that speaks SGLang's HTTP API."""
