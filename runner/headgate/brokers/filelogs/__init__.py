"""The parts of the file log that `headgate.brokers.filelog` is made of."""
