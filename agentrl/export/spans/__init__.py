"""OpenTelemetry spans of sessions and calls: made from rows, encoded, sent once over OTLP/HTTP."""
