"""State of one hop: row buffer, replay log, peers, outbox."""
