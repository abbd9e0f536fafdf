// A chat with the API, as values: what is sent, and what has come of an answer. No page, no network.

const LEVELS = [0.9, 0.5, 0.2, 0.05]; // probabilities: a token's level is how many of them it is below
const HINTS = {
  401: "Enter an API key above.",
  403: "This key may not do that.",
  429: "The router has as much to do as it takes. Try again in a moment.",
  503: "No pair of workers can serve just now. The fleet view tells why.",
};

export const NO_SETTINGS = { model: "", system: "", temperature: "0.7", max_tokens: "256", tools: "", schema: "" };

function parsed(text, name) {
  if (!text.trim()) return undefined;
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${name}: this is no JSON (${error.message}).`);
  }
}

/** What is sent for a prompt; throws an error in words if a field is no JSON. */
export function bodyOf(settings, messages) {
  const tools = parsed(settings.tools, "Tools");
  const schema = parsed(settings.schema, "JSON schema");
  const system = settings.system.trim() ? [{ role: "system", content: settings.system }] : [];
  return {
    ...(settings.model && { model: settings.model }),
    messages: [...system, ...messages],
    ...(settings.temperature !== "" && { temperature: Number(settings.temperature) }),
    ...(settings.max_tokens !== "" && { max_tokens: Number(settings.max_tokens) }),
    ...(tools && { tools: Array.isArray(tools) ? tools : [tools] }),
    ...(schema && { response_format: { type: "json_schema", json_schema: { name: "answer", schema } } }),
    stream: true,
    stream_options: { include_usage: true },
    logprobs: true,
    top_logprobs: 5,
  };
}

export const newAnswer = () => ({ content: "", reasoning: "", calls: [], tokens: [], finish: "", usage: null, error: "", id: "", isRunning: true, decoder: new TextDecoder() });

/** Add what a chunk of the stream says, which came `at_s` after the request was sent. Changes the answer in place. */
export function take(answer, chunk, at_s) {
  if (chunk.error) answer.error = `The answer broke off: ${chunk.error.message}`;
  if (chunk.usage) answer.usage = chunk.usage;
  const choice = chunk.choices?.[0];
  if (!choice) return;
  const { content, reasoning_content, tool_calls } = choice.delta ?? {};
  answer.content += content ?? "";
  answer.reasoning += reasoning_content ?? "";
  for (const { index, id, function: called } of tool_calls ?? []) {
    const call = (answer.calls[index] ??= { id: "", name: "", arguments: "", result: "" });
    call.id ||= id ?? "";
    call.name += called?.name ?? "";
    call.arguments += called?.arguments ?? "";
  }
  for (const { token, bytes, logprob, top_logprobs } of choice.logprobs?.content ?? []) {
    const text = bytes ? answer.decoder.decode(new Uint8Array(bytes), { stream: true }) : token;
    answer.tokens.push({ text, token, logprob, top: top_logprobs ?? [], at_s });
  }
  answer.finish = choice.finish_reason ?? answer.finish;
}

/** How surprising a token is: 0, it was nearly certain, to 4. */
export const levelOf = (logprob) => LEVELS.filter((least) => Math.exp(logprob) < least).length;

/** An answer as messages of the next request: the assistant's, and the results of its calls. */
export function messagesOf({ content, calls }) {
  const tool_calls = calls.map(({ id, name, arguments: text }) => ({ id, type: "function", function: { name, arguments: text } }));
  const results = calls.map(({ id, result }) => ({ role: "tool", tool_call_id: id, content: result || "null" }));
  return [{ role: "assistant", content, ...(calls.length && { tool_calls }) }, ...results];
}

/** An error of the API, in words. */
export function errorWords(status, body, retryAfter) {
  const { message, code } = body?.error ?? {};
  const hint = HINTS[status] ?? "";
  const wait = retryAfter ? `It asks to wait ${retryAfter} s.` : "";
  const reason = `The API refused (${status}${code ? `, ${code}` : ""}): ${message ?? "it gave no reason."}`;
  return [reason, hint, wait].filter(Boolean).join(" ");
}
