"""What serving over HTTP and gRPC costs, and what it carries beside other inference servers."""
