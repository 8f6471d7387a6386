"""How much load each way of serving several models carries while their deadlines are met."""
