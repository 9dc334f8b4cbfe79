"""The prediction of a step from its programs: time, memory, traffic and timeline, event by event."""
