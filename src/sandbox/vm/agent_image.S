# The guest agent, built before this file (cmake/agent.cmake), as read-only bytes of the program.
  .section .rodata
  .global tidelock_agent_begin
  .global tidelock_agent_end
  .balign 16
tidelock_agent_begin:
  .incbin TIDELOCK_AGENT_FILE
tidelock_agent_end:
  .section .note.GNU-stack,"",@progbits
