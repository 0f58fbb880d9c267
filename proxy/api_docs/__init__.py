"""The description of the HTTP API: `/openapi.json` and `/docs`."""
