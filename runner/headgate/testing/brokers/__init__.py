"""`BrokerConformance`: what every producer of a broker must do, on a server that is killed, paused and cut off."""
