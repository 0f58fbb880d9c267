"""The routes of vLLM that are used in more than one place, and those of `vllm_routes.py`."""

GENERATE = "/inference/v1/generate"
ABORT = "/inference/v1/abort_requests"
ABORT_ANY = "/abort_requests"
READY = "/ready"
PROMISES = "/agentrl/server"
LOAD = "/update_weights_from_disk"
DIGESTS = "/agentrl/digests"
NOT_FOUND = 404
