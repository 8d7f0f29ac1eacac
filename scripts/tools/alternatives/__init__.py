"""What others lose: one service built on LISTEN/NOTIFY, Redis Streams or JetStream."""
