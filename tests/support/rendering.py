"""Chat templates rendered as their process renders them, but in this one."""

from tandem.frontend.chat.chat_template import ChatTemplate
from tandem.frontend.chat.render_frames import HEADER, PROMPT
from tandem.frontend.chat.render_worker import Renderer, answer
from tandem.frontend.chat.template_sandbox import SandboxedTemplates
from tandem.frontend.request.conversation import Conversation
from tandem.frontend.request.ignored_fields import IgnoredFields


def rendered(template: ChatTemplate, conversation: Conversation, ignored: IgnoredFields | None = None) -> str:
    """Render the prompt of a conversation; raise ApiError as a chat would."""
    frame = template.request_frame(conversation, IgnoredFields() if ignored is None else ignored)
    reply = answer(Renderer(template.templates, SandboxedTemplates()), frame[HEADER.size :])
    text = reply[HEADER.size :].decode()
    if HEADER.unpack_from(reply)[1] != PROMPT:
        raise template.failed(text)
    return template.prompt(conversation, text)
