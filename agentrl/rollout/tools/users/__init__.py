"""Simulated users: who answers the model when it calls no tool."""
